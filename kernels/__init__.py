"""Attention and element-wise kernels: one op a file, `dispatch` the only chooser."""
