"""What alembic runs to migrate: over the connection, and in the transaction, that it is given."""

from __future__ import annotations

from alembic import context

attributes = context.config.attributes
context.configure(
    connection=attributes["connection"],
    version_table=attributes["version_table"],
    render_as_batch=True,  # SQLite alters a table by copying it
    transactional_ddl=True,
)
context.run_migrations()
