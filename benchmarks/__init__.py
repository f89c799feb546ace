"""fastamp beside torch.amp, measured in one process: ``python -m benchmarks --help``."""
