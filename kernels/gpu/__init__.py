"""Triton kernels, one op a file. Importing this package needs Triton, but no GPU."""
