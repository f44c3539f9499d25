"""`vime new`: writes the first files of a reward, an agent or a project, with a test that passes."""
