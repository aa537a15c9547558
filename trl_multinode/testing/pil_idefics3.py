"""Idefics3's image processor without torchvision, as code that travels with a model folder.

transformers 5.17 has the class and hides it: its lazy import takes every file with the word "TorchvisionBackend" in
it, here in a comment, for one that needs torchvision. So an engine loads this one, with `trust_remote_code`.
"""

from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil


class PilIdefics3ImageProcessor(Idefics3ImageProcessorPil):
    """The same, under a name of its own."""


PilIdefics3ImageProcessor.register_for_auto_class("AutoImageProcessor")
