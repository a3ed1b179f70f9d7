from ..grouped_gemm import run_grouped_gemm

__all__ = ["run_grouped_gemm"]
