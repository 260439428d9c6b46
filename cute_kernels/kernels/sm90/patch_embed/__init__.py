"""The patch embed of rows for SM90a: WGMMA with the weight resident in registers, transposed stores."""
