"""Instructions that an architecture does not have are refused before anything runs, compared with ptxas."""

from __future__ import annotations

import json
import re

import pytest

from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.emulator.isa.ptx.decode import parse
from cute_kernels.emulator.isa.ptx.families import arranged
from cute_kernels.emulator.isa.ptx.targets import missing
from cute_kernels.testing.ptx import module
from tests.emulator import ptxas_qualifiers
from tests.emulator.ptx_launch import launch
from tests.emulator.ptxas_operands import DATA, TARGETS, split

RECORDED = [json.loads(data.read_text()) for data in (DATA, ptxas_qualifiers.DATA)]


@pytest.mark.parametrize("recorded", RECORDED, ids=["operands", "qualifiers"])
@pytest.mark.parametrize("target", TARGETS)
def test_what_ptxas_has_of_a_target_is_executed_and_nothing_else(target: str, recorded: dict) -> None:
    verdicts = recorded["targets"][target]
    assert len(verdicts) == len(recorded["verdicts"])
    for form, verdict in zip(recorded["verdicts"], verdicts):
        opcode, _, operands = form.partition(" ")
        reason = missing(target, ".".join(arranged(opcode)), len(split(operands)))
        assert (reason == "") == (verdict == "1"), form


def test_the_first_target_and_version_of_every_opcode_are_those_of_ptxas() -> None:
    recorded = json.loads(ptxas_qualifiers.DATA.read_text())
    said = dict(zip(recorded["verdicts"], recorded["since"], strict=True)) | recorded["rare"]
    wrong = {form: (when, ptxas_qualifiers.first(form)) for form, when in said.items()}
    wrong = {form: both for form, both in wrong.items() if both[0] != both[1]}
    assert not [form for form in wrong if not re.search(ptxas_qualifiers.BY_OPERANDS, form)]
    assert len(said) > 900


@pytest.mark.parametrize(("version", "target", "instruction", "since"), [
    ("6.0", "sm_70", "elect.sync %r1|%p1, -1", "8.0"), ("6.5", "sm_75", "redux.sync.add.u32 %r1, %r2, -1", ""),
    ("7.8", "sm_90", "fence.proxy.async.shared::cta", "8.0"),
    ("7.0", "sm_80", "ld.global.L1::evict_last.b32 %r1, [%d1]", "7.4"),
    ("8.0", "sm_90a", "tensormap.replace.tile.rank.global.b1024.b32 [%d1], 1", "8.3"),
    ("8.0", "sm_90a", "ld.param::entry.b32 %r1, [%d1]", "8.3"),
    ("8.0", "sm_90", "mov.u32 %r1, %aggr_smem_size", "8.1"), ("8.7", "sm_100", "max.f32 %r1, %r2, %r3, %r4", "8.8"),
    ("7.0", "sm_80", "mov.u32 %r1, %cluster_ctarank", ""), ("6.0", "sm_70", "activemask.b32 %r1", "6.2"),
])  # fmt: skip
def test_instructions_that_are_newer_than_the_module(version: str, target: str, instruction: str, since: str) -> None:
    """``since`` is "" where the version has the instruction, and the target has not."""
    text = module(f"{instruction};\nret;", parameters=0, target=target)
    text = re.sub(r"\.version \S+", f".version {version}", text)
    message = f"version {version} does not have it: it needs .version {since} or" if since else "have it: it needs sm_"
    with pytest.raises(UnsupportedPTX, match=message) as error:
        launch(text)
    assert error.value.ptx_line is not None


@pytest.mark.parametrize(("target", "instruction", "message"), [
    ("sm_90a", "st.bulk.weak.shared::cta [%r1], %d1, 0", "sm_90a does not have it: it needs sm_100 or a later"),
    ("sm_100", "setmaxnreg.inc.sync.aligned.u32 64", "sm_100 does not have it: it needs sm_90a or a later"),
    ("sm_100a", "wgmma.fence.sync.aligned", "sm_100a does not have it: only the generation of sm_90a"),
    ("sm_120a", "tcgen05.wait::ld.sync.aligned", "only the generation of sm_100a does"),
    ("sm_80", "barrier.cluster.arrive", "sm_80 does not have it: it needs sm_90 or a later"),
])  # fmt: skip
def test_a_launch_is_refused(target: str, instruction: str, message: str) -> None:
    with pytest.raises(UnsupportedPTX, match=message) as error:
        launch(module(f"{instruction};\nret;", parameters=0, target=target))
    assert error.value.ptx_line is not None


#: Opcodes that ptxas 13.0 takes of the second targets, and not of the first.
LATER = {
    "cvt.rs.bf16x2.f32": ("sm_90a sm_100 sm_120a", "sm_100a sm_103a"),
    "cvt.rs.satfinite.e4m3x4.f32": ("sm_90a sm_100 sm_120a", "sm_100a sm_103a"),
    "cvt.rz.satfinite.tf32.f32": ("sm_80 sm_90a", "sm_100 sm_120"),
    **dict.fromkeys(("cvt.rn.tf32.f32", "cvt.rz.relu.tf32.f32", "cvt.rn.f16.bf16", "cvt.f64.bf16", "cvt.rni.s32.bf16",
                     "cvt.rn.bf16.s32", "cvt.rni.bf16.bf16", "cvt.ftz.f32.bf16", "ex2.approx.ftz.bf16x2",
                     "tanh.approx.bf16"), ("sm_80 sm_89", "sm_90 sm_120")),
    **dict.fromkeys(("ld.global.v8.f32", "ld.global.v4.u64", "st.global.L1::no_allocate.v8.b32"),
                    ("sm_80 sm_90a", "sm_100 sm_120")),
    **dict.fromkeys(("cvt.rna.tf32.f32", "cvt.rn.satfinite.bf16.f32", "cvt.rn.relu.bf16x2.f32", "cvt.f32.bf16",
                     "ld.global.v4.u32", "st.global.v2.u64", "ex2.approx.f16", "tanh.approx.f16x2"), ("", "sm_80")),
    "ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64": ("sm_90a sm_100 sm_120", "sm_100a sm_120a"),
    "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4": ("sm_90a", "sm_100 sm_120"),
    "multimem.ld_reduce.global.add.acc::f16.v4.e4m3x4": ("sm_90a sm_100 sm_120", "sm_100a sm_120a"),
    "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group": ("sm_100 sm_120a", "sm_100a sm_103a"),
}  # fmt: skip


@pytest.mark.parametrize("opcode", LATER)
def test_forms_that_only_some_architectures_have(opcode: str) -> None:
    without, having = (targets.split() for targets in LATER[opcode])
    assert [target for target in without if not missing(target, opcode)] == []
    assert [target for target in having if missing(target, opcode)] == []


def test_family_targets_have_what_those_of_one_architecture_have() -> None:
    assert not missing("sm_100f", "tcgen05.wait::ld.sync.aligned")
    assert missing("sm_100", "tcgen05.wait::ld.sync.aligned")


HEAD = ".version 8.8\n.target sm_90a\n.address_size 64\n"
#: Head of a module, and what is said of it; "" where ptxas 13.0 accepts it.
HEADS = {
    HEAD: "", HEAD.replace(".address_size 64\n", ""): "", HEAD.replace("sm_90a", "sm_90a, texmode_unified"): "",
    HEAD.replace("8.8", "8.0"): "", HEAD.replace("sm_90a", "sm_100f"): "", HEAD.replace("sm_90a", "sm_86"): "",
    HEAD.replace(".version 8.8\n", ""): "'.version' expected",
    HEAD.replace(".target sm_90a\n", ""): "'.target' expected",
    HEAD.replace("8.8", "8.9"): ".version 8.9: there is no such version", HEAD.replace("8.8", "x"): "no such version",
    HEAD.replace("8.8", "7.8"): "target sm_90a: it needs .version 8.0 or later, not 7.8",
    HEAD.replace("sm_90a", "sm_100f").replace("8.8", "8.7"): "it needs .version 8.8 or later",
    HEAD.replace("sm_90a", "sm_9999"): ".target sm_9999: there is no such target",
    HEAD.replace("sm_90a", "sm_90f"): "no such target", HEAD.replace("sm_90a", "debug"): "no such target",
    HEAD.replace("sm_90a", "sm_90a, fast"): ".target fast: there is no such target",
    HEAD.replace("sm_90a", "sm_90a, texmode_unified, texmode_independent"): "one texture mode at most",
    HEAD.replace("64", "32"): ".address_size 32: must be 64", HEAD.replace("64", "16"): ".address_size 16: must be 64",
}  # fmt: skip


@pytest.mark.parametrize(("head", "message"), HEADS.items())
def test_heads_of_modules(head: str, message: str) -> None:
    text = head + ".visible .entry k() { ret; }\n"
    if not message:
        assert parse(text).target == head.split(".target ")[1].split("\n")[0].split(",")[0]
        return
    with pytest.raises(UnsupportedPTX, match=message) as error:
        parse(text)
    assert error.value.ptx_line is not None


@pytest.mark.parametrize(
    "twice",
    [".reg .b32 a; .reg .b64 a;", ".reg .b32 a, a;", ".reg .b32 %q<4>; .reg .b32 %q2;", ".reg .b32 p0;", "L: L:",
     ".reg .b32 x; .shared .b32 x;", ".reg .b32 L; L:", ".shared .b32 x; .shared .b32 x;", ".reg .v2 .b32 v; v:"],
)  # fmt: skip
def test_names_are_declared_once_in_their_braces(twice: str) -> None:
    """ptxas says "Duplicate definition" of all of them, and takes the same names in braces of their own."""
    with pytest.raises(UnsupportedPTX, match="is declared twice in the same braces at PTX line"):
        parse(module(f"{twice} ret;", parameters=1)).kernels["k"]
    assert parse(module(".reg .b32 a; L: { .reg .b64 a; L: } ret;")).kernels["k"].instructions


@pytest.mark.parametrize(
    "twice", [".global .b32 x; .global .b64 x;", ".global .b32 k;", ".func f() { ret; } .func f() { ret; }"]
)
def test_names_of_the_module_are_declared_once(twice: str) -> None:
    with pytest.raises(UnsupportedPTX, match="is declared twice"):
        parse(module("ret;", head=twice))
    external = ".extern .shared .b32 more[]; .extern .shared .b32 more[]; .func f(); .func f() { ret; }"
    assert parse(module("ret;", head=external)).kernels["k"].instructions
