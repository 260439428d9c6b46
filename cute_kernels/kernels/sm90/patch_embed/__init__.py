"""The FP8 patch embed for SM90a: WGMMA with the weight resident in registers, transposed stores."""
