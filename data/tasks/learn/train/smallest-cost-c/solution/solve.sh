sqlite3 c.db 'select min(cost) from t' > answer.txt
