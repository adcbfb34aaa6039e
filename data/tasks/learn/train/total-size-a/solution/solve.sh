awk -F, '{s += $4} END {print s}' a.csv > answer.txt
