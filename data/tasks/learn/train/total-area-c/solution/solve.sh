sqlite3 c.db 'select sum(area) from t' > answer.txt
