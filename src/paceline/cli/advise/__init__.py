"""`paceline advise`: a recommendation from a short run or from given figures."""
