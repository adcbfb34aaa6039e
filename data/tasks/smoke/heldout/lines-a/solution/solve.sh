wc -l < a.csv > answer.txt
