"""Keys and values in pages: what a table says of them, formulas that gather and store them, and the
attention of a decode step that reads them where they lie.
"""

from nsa.ops.paged.decode import PagesGeometry as PagesGeometry
from nsa.ops.paged.decode import append as append
from nsa.ops.paged.decode import append_means as append_means
from nsa.ops.paged.decode import attend as attend
from nsa.ops.paged.decode import fits_one_tile as fits_one_tile
from nsa.ops.paged.decode import has_kernels_of as has_kernels_of
from nsa.ops.paged.pages import LayerPages as LayerPages
from nsa.ops.paged.pages import Pages as Pages
from nsa.ops.paged.pages import blocks_before as blocks_before
