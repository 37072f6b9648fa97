"""Models and training on top of the layer."""
