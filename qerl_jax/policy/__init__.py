"""What the model is: the quantised transformer, its adapter and its noise."""
