"""What the commands do: train, evaluate, sample, show, export, quantize, plan, sweep."""
