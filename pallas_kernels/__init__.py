"""GPU kernels: arrays in, arrays out."""
