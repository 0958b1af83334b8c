"""Which implementation serves which branch, decided before anything runs.

Pure: no torch, no environment, no try. ``nouns`` is what is asked and answered, ``support`` what
each provider's kernels can serve, ``thresholds`` and ``user_table`` what was measured, ``speed``
what `auto` makes of it, ``cards`` what a GPU gives a program, ``decide`` the decision.
"""

from nsa.routing.decide import CACHED_DENSE_KINDS as CACHED_DENSE_KINDS
from nsa.routing.decide import DENSE_KINDS as DENSE_KINDS
from nsa.routing.decide import STAIRCASE as STAIRCASE
from nsa.routing.decide import is_one_block as is_one_block
from nsa.routing.decide import is_one_step as is_one_step
from nsa.routing.decide import plan as plan
from nsa.routing.decide import route as route
from nsa.routing.decide import route_dense as route_dense
from nsa.routing.decide import route_dense_cached as route_dense_cached
from nsa.routing.decide import with_one_step as with_one_step
from nsa.routing.nouns import ADAPTIVE as ADAPTIVE
from nsa.routing.nouns import AUTO as AUTO
from nsa.routing.nouns import DENSE as DENSE
from nsa.routing.nouns import EXPLICIT as EXPLICIT
from nsa.routing.nouns import FA2_CHOICES as FA2_CHOICES
from nsa.routing.nouns import ONE_STEP as ONE_STEP
from nsa.routing.nouns import PATH_REQUESTS as PATH_REQUESTS
from nsa.routing.nouns import PHI_MAX_HIDDEN as PHI_MAX_HIDDEN
from nsa.routing.nouns import SCORE as SCORE
from nsa.routing.nouns import SPECS as SPECS
from nsa.routing.nouns import TRITON_STEPS as TRITON_STEPS
from nsa.routing.nouns import BranchRoute as BranchRoute
from nsa.routing.nouns import Capability as Capability
from nsa.routing.nouns import Path as Path
from nsa.routing.nouns import PathSpec as PathSpec
from nsa.routing.nouns import Problem as Problem
from nsa.routing.nouns import Rejected as Rejected
from nsa.routing.nouns import Request as Request
from nsa.routing.nouns import Route as Route
from nsa.routing.nouns import RouteError as RouteError
from nsa.routing.nouns import extras_of as extras_of
from nsa.routing.nouns import kept_tokens_of as kept_tokens_of
from nsa.routing.nouns import scores_of as scores_of
from nsa.routing.thresholds import MASK_LIMIT_ELEMENTS as MASK_LIMIT_ELEMENTS
from nsa.routing.user_table import CardEntry as CardEntry
from nsa.routing.user_table import UserTable as UserTable
