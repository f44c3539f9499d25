"""The families with latent attention (`slime.models.latent`), one file per family."""
