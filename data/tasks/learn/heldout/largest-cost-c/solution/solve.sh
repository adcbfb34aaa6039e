sqlite3 c.db 'select max(cost) from t' > answer.txt
