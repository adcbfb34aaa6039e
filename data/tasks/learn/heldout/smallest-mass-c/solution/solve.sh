sqlite3 c.db 'select min(mass) from t' > answer.txt
