"""Portable Triton kernels (sm_80 and up). They know pointers, strides and constants, and nothing of torch."""
