"""What leaves the project: adapters, merged and quantized checkpoints, and their model card."""
