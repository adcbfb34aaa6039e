awk -F, '{s += $6} END {print s}' a.csv > answer.txt
