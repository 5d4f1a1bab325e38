"""Transport of weights versions from trainer ranks to engines; neither side knows the other."""
