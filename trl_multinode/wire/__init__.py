"""Code that a rank and its engine processes share: `messages`, the `connection` that frames them, `supervisor`."""
