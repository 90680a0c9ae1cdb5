"""Training on devices: the loop, metrics, preemption, evaluation, sampling, parity of meshes."""
