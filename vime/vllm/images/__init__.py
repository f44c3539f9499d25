"""Images and videos of requests: their form in a request, and the engine's input that is made from them."""
