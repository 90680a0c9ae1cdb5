"""Models: families, their building blocks and kernels, the forward pass, the loss,
rematerialisation, FLOPs."""
