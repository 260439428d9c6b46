"""Reports of faults: what `cute_kernels.emulator.errors` carry, explained, for terminals, programs and code hosts.

`diagnosis.diagnose` makes a `model.Diagnostic` of an error; `text`, `document` and `sarif` write it; `kinds` has the
table of kinds of faults.
"""
