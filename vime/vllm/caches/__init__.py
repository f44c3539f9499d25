"""Keys and values of prompts in an engine: their ages, and their way from the engines that compute them."""
