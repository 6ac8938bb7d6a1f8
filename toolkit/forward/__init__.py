"""Forward: tokens in, logits out. Measures nothing but itself against the model's own forward."""
