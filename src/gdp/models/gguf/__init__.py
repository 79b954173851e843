"""GGUF: weights in llama.cpp's types, and models from the metadata of `.gguf` files."""
