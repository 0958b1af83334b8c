"""The page of a history: a static folder that needs no server, and its charts as PNG."""

from perfbench.history.site.charts import chart_png
from perfbench.history.site.write import SiteOptions, write_site
