"""What the model is: the quantized transformer, its adapter and its noise."""
