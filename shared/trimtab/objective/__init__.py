"""One objective from five places, called by every adapter on the same tensors."""

from trimtab.objective.compose import Objective
from trimtab.objective.places import MASKS, PENALTIES, SURROGATES, WEIGHTS, Place, Term

__all__ = ["MASKS", "PENALTIES", "SURROGATES", "WEIGHTS", "Objective", "Place", "Term"]
