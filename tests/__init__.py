"""The suite; small models take the ways that large ones take."""

from tpplan.comm import products

products.WORTH = 0
