"""SGLang: NVFP4 experts of its runner ``flashinfer_cutlass`` decode on our kernels, on SGLang's own tensors."""
