"""One small launch of each variant, for `sanitize.sh`. ``--planted`` reads beyond a table that is one row too short."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from cute_kernels.operations.patch_embed import PATCH_EMBED
from cute_kernels.operations.runtime import gpu
from tests.gpu.harness import random_call, run_poisoned
from tests.gpu.patch_embed_configs import AT_HAND

CONFIGS = AT_HAND.sanitized


def main() -> None:
    call = random_call(70, 5, 264, 400, small_integers=True)
    if "--planted" in sys.argv:
        given = {"x": call.x, "weight": call.weight, "bias": call.bias, "pos_embed": call.pos_embed}
        prepared = PATCH_EMBED.prepared(**given, scale_a=call.scale, config=CONFIGS[0])
        table = prepared.operands.table[:-1].clone()
        gpu.launch(prepared.plan, prepared.operands.replace(table=table))
        torch.cuda.synchronize()
        return
    # A few multiprocessors, so that a cluster takes several tiles and every ring wraps around.
    outputs = {config: run_poisoned(call, config, sm_count=6)[0] for config in CONFIGS}
    first = outputs[CONFIGS[0]]
    for config, out in outputs.items():
        assert config.epilogue != CONFIGS[0].epilogue or torch.equal(out, first), config
    print("launched", len(CONFIGS))


if __name__ == "__main__":
    main()
