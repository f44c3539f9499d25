"""The images and videos of a row of a prompt file."""
