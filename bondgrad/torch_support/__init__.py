"""Where the layer meets PyTorch: autograd, compilers, checkpoints, precision, processes, CUDA graphs."""
