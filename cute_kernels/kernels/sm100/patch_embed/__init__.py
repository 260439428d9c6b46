"""The FP8 patch embed for SM100a: persistent, warp-specialised, on CTA pairs."""
