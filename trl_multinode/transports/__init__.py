"""Staging slots through which weights reach the engines; a transport is one file, with both its ends (`base`)."""
