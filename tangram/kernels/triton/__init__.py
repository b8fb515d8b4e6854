"""The backend of a GPU: Triton kernels, their launches, and what the card allows."""
