"""The dense GEMM for SM100a: tcgen05 on CTA pairs, one or two waves of UMMA per stage."""
