sqlite3 c.db 'select max(area) from t' > answer.txt
