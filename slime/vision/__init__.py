"""Images and videos of prompts: their sources, the model's processor, and the processed tensors."""
