"""What leaves the project: PEFT adapters, merged and NVFP4 checkpoints, and their model card."""
