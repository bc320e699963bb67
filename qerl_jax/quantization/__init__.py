"""How weights of 16 bits become weights of 4: by rounding, or calibrated by GPTQ, and kept."""
