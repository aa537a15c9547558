"""The watch of a rank, from the import of the library on: it ends all ranks together when one ends or fails."""
