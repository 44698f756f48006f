"""Triton kernels over raw tensors. Each file holds a public function, its kernels and a reference in plain
torch (`*_reference`), which the tests compare the kernels with."""
