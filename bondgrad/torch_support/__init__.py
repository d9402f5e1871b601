"""How the layer works with PyTorch: autograd, compilers, checkpoints, precision, processes, CUDA graphs."""
