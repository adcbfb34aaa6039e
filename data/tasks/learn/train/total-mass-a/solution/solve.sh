awk -F, '{s += $5} END {print s}' a.csv > answer.txt
