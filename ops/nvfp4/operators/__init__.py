"""The operators: in each file the schema, checks, launch, fake and the public function."""
